import os, resource, signal, sys, tempfile, time

def penalty(logp, ref_logp, kind):
    u = logp - ref_logp
    if kind == "square":
        return FACTOR * u**2 / 2
    if kind == "linear":
        return u
    if kind == "raises":
        raise ValueError("this version does not know how")
    if kind == "leaves":
        os._exit(7)
    if kind == "hangs":
        time.sleep(3600)
    if kind == "kills":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3600)
    if kind == "fills":
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        with tempfile.NamedTemporaryFile(delete=False) as file, open("beside", "wb") as beside:
            beside.write(bytes(1 << 10))
            print(os.path.abspath("beside"), file.name)
            file.write(bytes(1 << 20))
