"""Lengths -> plan. Stdlib and numpy only: importing it loads neither torch, ray nor verl."""
