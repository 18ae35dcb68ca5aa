"""Sign-in sessions: a token per browser, valid for a fortnight."""

LIFETIME_DAYS = 14


def sign_in(user, password, store):
    if not store.matches(user, password):
        raise PermissionError("wrong name or password")
    return store.new_token(user, LIFETIME_DAYS)


def sign_out(token, store):
    store.forget(token)
