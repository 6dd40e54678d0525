"""Runs the `howdah` command as `python -m howdah`."""

from howdah.cli.main import main

if __name__ == "__main__":
    main()
