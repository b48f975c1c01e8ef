"""Entry point of the command `megacore`, also as `python -m megacore`."""


def main() -> None:
    """Run the command line; end without a word on a Ctrl-C while its modules are imported."""
    try:
        from megacore.cli import main as run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
