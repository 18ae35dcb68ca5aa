"""Exchange rates of the European Central Bank, fetched once a day and kept for weekends."""

URL = "https://www.ecb.europa.eu/stats/eurofxref/eurofxref-daily.xml"
MAX_AGE_H = 80


def convert(amount, source, target, rates):
    return amount / rates[source] * rates[target]
