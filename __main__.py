"""`python -m llmctl` is the command `llmctl`."""

from .cli.app import main

if __name__ == "__main__":
    main()
