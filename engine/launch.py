"""From an EngineConfig to something that answers in text, on a thread of this process or in a process of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ..kernels.errors import UnsupportedModel
from .assemble import assemble
from .attach import attach
from .config import EngineConfig
from .find import find_model
from .frontend import Frontend
from .load.packed import PackedModel
from .load.progress import Progress
from .local_client import LocalClient
from .process import EngineProcess, new_epoch
from .score import Scorer
from .tokenizer import Tokenizer


def launch(config: EngineConfig, *, process: bool = False, progress: Progress | None = None) -> Frontend:
    """A ready engine behind its text face.

    Raises LlmctlError for a model that cannot be found, read or run here, and for options that do not fit.
    """
    config.check()
    if process:
        return attach(EngineProcess(config, new_epoch()), config, progress=progress)
    model = find_model(config, progress)
    with ThreadPoolExecutor(1) as beside:  # parsing a vocabulary takes as long as building the engine
        parsed = beside.submit(Tokenizer, model.folder)
        engine, info = assemble(config, model, epoch=new_epoch(), progress=progress)
    return Frontend(LocalClient(engine, info), parsed.result(), config.seed)


def open_scorer(config: EngineConfig, max_tokens: int) -> Scorer:
    """The config's model, ready to say what it makes of texts of at most `max_tokens` tokens; its weights are mapped.

    UnsupportedModel where the model is computed by transformers' modules.
    """
    model = find_model(config)
    if not isinstance(model, PackedModel):
        raise UnsupportedModel(f"`{model.name}` is computed by transformers' modules, which show no hidden states")
    return Scorer(model, max_tokens, config)
