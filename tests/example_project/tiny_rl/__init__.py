"""A small library of losses."""
