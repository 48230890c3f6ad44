from kltest.sweeps.settings import Settings

SETTINGS = Settings(
    title="Roots", tags=(), values={"number": tuple(range(12))}, full={"number": tuple(range(24))},
    allowed={"number": (0, 99)},
)
