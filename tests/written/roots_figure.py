from matplotlib.figure import Figure

def draw(rows, *others):
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot(rows["number"].tolist(), rows["root"].tolist(), label="roots")
    return figure
