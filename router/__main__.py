"""`python -m router --config FILE`: one router process."""

from router.main import main

if __name__ == "__main__":
    main()
