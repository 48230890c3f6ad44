"""Sums over the rows of a group, as the estimators that couple them need."""

# mypy: disable-error-code="no-untyped-def"


def group_sum(values, group):
    """(B,) for every row the sum of `values` (B,) over the rows that share its number in `group` (B,) int."""
    _, place = group.unique(return_inverse=True)
    return values.new_zeros(int(place.max()) + 1).index_add(0, place, values)[place]
