"""Running many configurations once each: a store that survives anything, and the loop that fills it."""
