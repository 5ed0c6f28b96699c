// Package networks tries names from several networks at once: namespaces of the
// kernel that can't reach each other but through gateways, each with a DNS server
// of its own, and dig and curl as clients in each.
//
// Its tests need root, ip, nft and unshare, and the tag netns.
package networks
