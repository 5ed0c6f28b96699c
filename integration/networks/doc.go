// Package networks tries names from several networks at once: namespaces of the
// kernel that can't reach each other but through gateways, each with a DNS server
// of its own, and dig and curl as clients in each; and systemd-resolved, which
// wants a machine for itself; and a gateway behind a network that blocks carriers.
//
// Its tests need root, ip, nft, unshare, nginx and dbus-daemon, what make peers puts at bin/resolved,
// and the tag netns.
package networks
