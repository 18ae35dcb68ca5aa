"""Applies the SQL files of a folder in order, each once, inside a transaction."""


def apply_all(connection, folder):
    done = {row[0] for row in connection.execute("SELECT name FROM schema_versions")}
    for path in sorted(folder.glob("*.sql")):
        if path.name not in done:
            with connection:
                connection.executescript(path.read_text())
                connection.execute("INSERT INTO schema_versions VALUES (?)", (path.name,))
