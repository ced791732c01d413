"""The checker: whether the scale of a loss function or a trainer is right, and if not, why."""
