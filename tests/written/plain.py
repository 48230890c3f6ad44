def k2(logp, ref_logp):
    return (logp - ref_logp) ** 2 / 2

class Losses:
    scale = 1.0

    @staticmethod
    def static(logp, ref_logp):
        return k2(logp, ref_logp)

    @classmethod
    def of_class(cls, logp, ref_logp):
        return cls.scale * k2(logp, ref_logp)

    def plain(self, logp, ref_logp):
        return self.beta * self._helper(logp, ref_logp) * self.scale * self.unit

    def _helper(self, logp, ref_logp):
        return k2(logp, ref_logp)

    @property
    def unit(self):
        return self.one

    class Inner:
        @staticmethod
        def deep(logp, ref_logp):
            return k2(logp, ref_logp)

instance = Losses()
instance.beta, instance.one = 2.0, 0.5
number = 3

def named(log_p, log_q, kind):
    return k2(log_p, log_q) if kind == "mse" else None

if __name__ == "__main__":
    raise SystemExit("ran")
