"""Pure functions of tensors: no model, no settings, no logging. Each docstring gives the equation, the shapes and the source."""
