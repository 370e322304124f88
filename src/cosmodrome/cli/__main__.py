"""`python -m cosmodrome.cli` is `cosmo`."""

from cosmodrome.cli.main import main

main()
