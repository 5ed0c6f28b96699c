// Package nft writes one table of nftables at a time, by netlink and without the
// program nft.
//
//	c, err := nft.Open()
//	defer c.Close()
//	err = c.Replace(&nft.Table{Name: "culvert", Owned: true, Sets: sets, Chains: chains})
//	err = c.ChangeSets("culvert", nft.SetChange{Set: "vips4", Added: added})
//
// Every call is one transaction: the kernel does all of it, or nothing. An owned table
// belongs to the Conn that made it. The kernel deletes it with the Conn, also where the
// process is killed, no other process can change it, and "nft flush ruleset" of another
// process leaves it.
//
// It knows the sets, chains and expressions that capture needs and no others, of the
// family inet. It is for Linux; the formats are those of linux/netfilter/nf_tables.h.
package nft
