"""`python -m autopar.runtime SCRIPT ARGUMENTS`: one rank, as the launcher starts it."""

from autopar.runtime.launch.worker import main

if __name__ == "__main__":
    main()
