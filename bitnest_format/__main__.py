"""`python -m bitnest_format` is `bitnest-format`."""

from bitnest_format.cli import main

if __name__ == "__main__":
    main(prog_name="bitnest-format")
