"""`python -m howdah`."""

from howdah.cli import main

if __name__ == "__main__":
    main()
