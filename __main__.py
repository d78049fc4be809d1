"""`python -m llmctl` is the command `llmctl`."""

from .cli.start import main

if __name__ == "__main__":
    main()
