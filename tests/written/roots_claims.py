import os
from kltest.reproduce.bounds import below
from kltest.reproduce.claims import Claims
from kltest.reproduce.frames import frame, need, records
from kltest.reproduce.numbers import Numbers, number

claims, numbers = Claims("roots"), Numbers()

def limit():
    return float(os.environ.get("LIMIT", 100))

def tidy(rows):
    return frame(rows).sort_values("number")

@claims.measure("arithmetic", "a limit", share_of_limit=below(1))
def small(rows):
    '''roots are small'''
    return {"share_of_limit": need(rows)["root"] / limit()}

def tables(rows):
    return {"table": records(rows)}

@numbers.add
def largest(rows):
    yield number("root", need(rows)["root"].max(), which="largest")
