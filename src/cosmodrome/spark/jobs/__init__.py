"""Programs over the source and the sink; `cosmo pipeline NAME` runs them."""
