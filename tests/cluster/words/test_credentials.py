"""What the processes of a deployment share does not get out by accident."""

from cluster.words.credentials import Credentials, Purpose


def test_credentials_survive_the_way_to_a_process_and_do_not_show() -> None:
    credentials = Credentials.new()
    assert Credentials.from_plain(credentials.to_plain()) == credentials
    assert credentials.secret.hex() not in f"{credentials!r} {credentials}"
    assert Credentials.new() != credentials


def test_each_use_has_a_key_of_its_own() -> None:
    credentials, other = Credentials.new(), Credentials.new()
    keys = [each.key(purpose) for each in (credentials, other) for purpose in Purpose]
    assert len(set(keys)) == 2 * len(Purpose) and {len(key) for key in keys} == {32}
    assert credentials.key(Purpose.LINKS) == Credentials.from_plain(credentials.to_plain()).key(Purpose.LINKS)
