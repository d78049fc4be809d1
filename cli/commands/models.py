"""`llmctl models`"""

import typer

models = typer.Typer(help="x")


@models.command("list")
def list_models() -> None:
    """x"""
