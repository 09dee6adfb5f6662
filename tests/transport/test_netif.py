"""Which interface is chosen, and what is said when none can be: on this host's loopback and on made-up hosts."""

from __future__ import annotations

import socket

import pytest

from dblp.errors import ConfigError
from dblp.transport import libc, netif
from dblp.transport.libc import Interface
from dblp.transport.netif import Choice, choose, choose_all, matches
from dblp.transport.port import Address

TABLE = [
    Interface("lo", "127.0.0.1", True),
    Interface("eth0", "10.0.0.5", True),
    Interface("eth1", "192.168.7.5", True),
    Interface("ens3", "172.20.0.5", True),
    Interface("docker0", "172.17.0.1", True),
    Interface("wlan0", "10.9.9.9", False),
    Interface("tun0", "", True),
    Interface("lo", "::1", True),
    Interface("eth0", "fd00::5", True),
    Interface("eth1", "fe80::5%eth1", True),
]
NAMES = {
    "node1": ["10.0.0.9"],
    "me": ["127.0.1.1"],
    "localhost": ["127.0.0.1"],
    "both": ["fd00::9", "10.0.0.9"],
}
ROUTES = {
    "10.0.0.9": "10.0.0.5",
    "fd00::9": "fd00::5",
    "192.168.7.9": "192.168.7.5",
    "fe80::9%eth1": "fe80::5%eth1",
    "127.0.0.1": "127.0.0.1",
    "127.0.1.1": "127.0.0.1",
    "192.0.2.1": "192.168.7.5",  # what the default route uses
}
MTUS = {"lo": 65_536, "eth0": 1500, "eth1": 9000, "ens3": 1400, "docker0": 1500}


@pytest.fixture
def host(monkeypatch):
    """A made-up host; returns its table of routes, which a test may change."""
    routes = dict(ROUTES)

    def resolve(name: str) -> list[str]:
        return NAMES.get(name, [name])

    monkeypatch.setattr(libc, "interfaces", lambda: TABLE)
    monkeypatch.setattr(netif, "resolve", resolve)
    monkeypatch.setattr(netif, "route_source", routes.get)
    monkeypatch.setattr(netif, "mtu_of", MTUS.__getitem__)
    return routes


@pytest.mark.parametrize(
    ("pattern", "master", "ifname", "address"),
    [
        ("", "node1", "eth0", "10.0.0.5"),
        ("", "192.168.7.9", "eth1", "192.168.7.5"),
        ("", "fe80::9%eth1", "eth1", "fe80::5%eth1"),
        ("", "both", "eth0", "fd00::5"),  # the resolver's order decides the family
        ("", "localhost", "lo", "127.0.0.1"),
        ("", None, "lo", "127.0.0.1"),
        ("eth1", "node1", "eth1", "192.168.7.5"),
        ("eth", "192.168.7.9", "eth1", "192.168.7.5"),  # of those that fit, the one on the route
        ("ens,docker", "node1", "ens3", "172.20.0.5"),
        ("^eth,ens,lo", "node1", "docker0", "172.17.0.1"),
        ("=eth0", None, "eth0", "10.0.0.5"),
        ("^=lo", "localhost", "eth0", "10.0.0.5"),
        ("lo", "localhost", "lo", "127.0.0.1"),
        ("172.20.0.5", "node1", "ens3", "172.20.0.5"),
        ("127.0.0.7", "localhost", "lo", "127.0.0.7"),
    ],
)
def test_choice(host, pattern, master, ifname, address):
    choice = choose(pattern, master=master)
    assert (choice.ifname, choice.host, choice.mtu) == (ifname, address, MTUS[ifname])
    assert choice.family == (socket.AF_INET6 if ":" in address else socket.AF_INET)
    assert (pattern or master or "no master") in choice.why


def test_own_name_that_leads_to_loopback_takes_the_default_route(host):
    """Debian maps a host's own name to 127.0.1.1, which no other host can reach."""
    choice = choose(master="me")
    assert (choice.ifname, choice.host) == ("eth1", "192.168.7.5")
    assert "127.0.1.1" in choice.why
    del host["192.0.2.1"]
    assert choose(master="me").ifname == "lo"


@pytest.mark.parametrize(
    ("pattern", "master", "says"),
    [
        (
            "ib",
            "node1",
            r"DBLP_IFNAME='ib' fits no interface of this host: it has lo \(127.0.0.1, ::1\), eth0",
        ),
        ("=eth", "node1", "fits no interface"),
        ("tun0", "node1", r"fits tun0 \(no address\), but none is up with an IPv4 address"),
        ("wlan0", "node1", "none is up with an IPv4 address"),
        ("ens3", "fd00::9", "none is up with an IPv6 address"),
        ("lo", "node1", "names a loopback interface .* but the master 10.0.0.9 is another host"),
        ("", "10.1.1.1", r"no route leads to the master 10.1.1.1 .* this host has .*wlan0 .* DBLP_IFNAME"),
    ],
)
def test_errors_say_what_there_is(host, pattern, master, says):
    with pytest.raises(ConfigError, match=says):
        choose(pattern, master=master)


def test_host_given(host):
    assert choose(host="172.20.0.5").ifname == "ens3"
    assert choose(host="127.0.0.77").ifname == "lo"  # the loopback interface answers to all of 127.0.0.0/8
    assert choose(host="fe80::5").host == "fe80::5%eth1"
    with pytest.raises(ConfigError, match=r"10\.0\.0\.6 is no address of this host: it has lo"):
        choose(host="10.0.0.6")
    with pytest.raises(ConfigError, match="'eth0' is no numeric address"):
        choose(host="eth0")


@pytest.mark.parametrize(
    ("pattern", "paths", "addresses"),
    [
        (
            "eth1,eth0",
            4,
            ["192.168.7.5", "10.0.0.5"] * 2,
        ),  # in the order of the list, the route notwithstanding
        ("eth1,eth0", 1, ["10.0.0.5"]),  # one path: the one on the route
        ("eth0", 3, ["10.0.0.5"] * 3),
        ("eth", 3, ["10.0.0.5"] * 3),  # no list
        ("=eth0,ens3,eth1", 3, ["10.0.0.5", "172.20.0.5", "192.168.7.5"]),
        ("eth,ens", 4, ["10.0.0.5", "192.168.7.5", "172.20.0.5", "10.0.0.5"]),
        ("eth0,eth", 3, ["10.0.0.5", "192.168.7.5", "10.0.0.5"]),  # none twice
        ("wlan0,ib,ens3,eth0", 2, ["172.20.0.5", "10.0.0.5"]),  # what is down or absent is passed over
        ("lo,eth0", 2, ["10.0.0.5"] * 2),  # nobody else reaches loopback
        ("^eth,lo", 2, ["172.20.0.5"] * 2),
        ("10.0.0.5,192.168.7.5", 3, ["10.0.0.5", "192.168.7.5", "10.0.0.5"]),
        ("", 2, ["10.0.0.5"] * 2),
    ],
)
def test_paths_take_turns_on_the_interfaces_that_are_listed(host, pattern, paths, addresses):
    choices = choose_all(pattern, paths, master="node1")
    assert [choice.host for choice in choices] == addresses
    for choice in choices:
        assert choice.mtu == MTUS[choice.ifname] and choice.family == socket.AF_INET


def test_listed_interfaces_share_the_family_of_the_route(host):
    assert [choice.host for choice in choose_all("eth0,eth1", 2, master="both")] == [
        "fd00::5",
        "fe80::5%eth1",
    ]
    with pytest.raises(ConfigError, match=r"10\.0\.0\.6 is no address of this host"):
        choose_all("10.0.0.5,10.0.0.6", 2, master="node1")
    with pytest.raises(ConfigError, match="fits no interface"):
        choose_all("ib0,ib1", 2, master="node1")


@pytest.mark.parametrize(
    ("pattern", "takes"),
    [
        ("eth", {"eth0", "eth10"}),
        ("eth1", {"eth10"}),
        ("=eth0", {"eth0"}),
        ("=eth", set()),
        ("eth0, lo", {"eth0", "lo"}),
        ("^lo", {"eth0", "eth10", "docker0"}),
        ("^=eth0,lo", {"eth10", "docker0"}),
    ],
)
def test_patterns(pattern, takes):
    assert {name for name in ("lo", "eth0", "eth10", "docker0") if matches(pattern, name)} == takes


def test_datagrams_fit_the_mtu():
    """1500 less 28 (IPv4) or 48 (IPv6) bytes of headers; never more than what is wanted."""
    four = Choice(host="10.0.0.5", ifname="eth0", mtu=1500, family=socket.AF_INET, why="")
    six = Choice(host="fd00::5", ifname="eth0", mtu=1500, family=socket.AF_INET6, why="")
    assert four.max_datagram_bytes(1464) == 1464
    assert four.max_datagram_bytes(8952) == 1472
    assert six.max_datagram_bytes(1464) == 1452


def test_this_host_has_loopback():
    assert Interface("lo", "127.0.0.1", True) in libc.interfaces()
    choice = choose(master="127.0.0.1")
    assert (choice.ifname, choice.host) == ("lo", "127.0.0.1")
    assert choice.mtu == netif.mtu_of("lo") >= 1500
    assert netif.route_source("127.0.0.1") == "127.0.0.1"


def test_unresolvable_master():
    with pytest.raises(ConfigError, match=r"'nosuch\.invalid' cannot be resolved .* MASTER_ADDR"):
        choose(master="nosuch.invalid")


def test_unknown_interface_has_no_mtu():
    with pytest.raises(ConfigError, match="'nosuch0' cannot be read"):
        netif.mtu_of("nosuch0")


@pytest.mark.parametrize(
    "address",
    [
        Address("10.1.2.3", 1),
        Address("255.255.255.255", 65_535),
        Address("fd00::5", 4711),
        Address("::1", 80),
    ],
)
def test_socket_addresses_are_read_back_as_written(address):
    raw = libc.encode_sockaddr(address, netif.family_of(address.host))
    assert libc.decode_sockaddr(raw + bytes(4)) == address


def test_link_local_addresses_keep_their_scope():
    index = socket.if_nametoindex("lo")
    raw = libc.encode_sockaddr(Address("fe80::1%lo", 7), socket.AF_INET6)
    assert int.from_bytes(raw[24:28], "little") == index
    assert libc.decode_sockaddr(raw) == Address("fe80::1%lo", 7)
    assert netif.sockaddr("fe80::1%lo", 7, socket.AF_INET6) == ("fe80::1", 7, 0, index)
    assert libc.with_scope("fd00::1", index) == "fd00::1"
