"""One step of the model over replay trees: passes, scoring, and what models it runs exactly."""
