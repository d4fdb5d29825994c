"""Hydra configs: our primary config, the ``treecp`` model engine, and the ``cpu`` platform."""
