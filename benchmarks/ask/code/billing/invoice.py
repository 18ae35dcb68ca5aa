"""Invoices: lines, value added tax, total in cents."""

TAX_PERCENT = 19


def total_cents(lines):
    net = sum(line.cents * line.count for line in lines)
    return net + (net * TAX_PERCENT + 50) // 100
