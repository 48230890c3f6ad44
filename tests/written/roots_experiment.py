import os, time

def compute(configuration):
    time.sleep(float(os.environ.get("PAUSE", 0)))
    number = configuration["number"]
    if number == int(os.environ.get("BREAK", -1)):
        raise ValueError("this number is unlucky")
    if number == int(os.environ.get("DIE", -1)):
        os._exit(9)
    with open(os.environ.get("CALLS", os.devnull), "a") as calls:
        print(number, file=calls)
    return [{"number": number, "root": number**0.5}]
