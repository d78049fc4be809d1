"""How to serve, as asked on the command line."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """How many sequences of one tenant may wait: of those that are `named` so many, of any other `others`; 0: all."""

    others: int = 0
    named: Mapping[str, int] = field(default_factory=dict)

    def of(self, tenant: str) -> int:
        """The limit of this tenant, 0 for none."""
        return self.named.get(tenant, self.others)


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything about the server that is not about the engine.

    names               names of the model that requests may use, at least one once it serves; the first one is shown
    uds                 serve on this Unix socket instead of host and port; "" for none
    max_queue           sequences that may wait besides the `max_num_seqs` that run
    tenant_queues       how many of one tenant may
    shutdown_timeout_s  how long a SIGTERM waits for open requests
    stuck_after_s       without a step for so long, `/health` fails
    chat_template       used instead of the model's own
    debug_requests      serve `/debug/requests`, which shows whose requests there are
    model_defaults      unset sampling fields are what the model's makers recommend, else what the OpenAI API says
    """

    names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    ssl_keyfile: str = ""
    ssl_certfile: str = ""
    max_queue: int = 1024
    tenant_queues: TenantLimits = field(default_factory=TenantLimits)
    shutdown_timeout_s: float = 30.0
    stuck_after_s: float = 60.0
    log_requests: bool = True
    metrics: bool = True
    debug_requests: bool = False
    chat_template: str | None = None
    model_defaults: bool = True


def tenant_of(key: str) -> str:
    """What the tenant with this API key is called where people may read it."""
    return "key-" + hashlib.sha256(key.encode()).hexdigest()[:12]
