"""Sends order confirmations through the SMTP relay; bounced addresses are blocked after two failures."""

BLOCK_AFTER = 2


def confirm(order, relay, blocked):
    if blocked.count(order.email) < BLOCK_AFTER:
        relay.send(order.email, f"Your order {order.number}", order.text())
