// Package netns makes Linux network namespaces for tests: two networks that
// can't reach each other, a gateway between them, a link that goes down, a
// port that drops everything.
//
//	west, east := netns.New(t, "west"), netns.New(t, "east")
//	netns.Link(t, west, "10.9.0.1/24", east, "10.9.0.2/24")
//	ln, err := east.Listen("tcp", "10.9.0.2:443")
//	conn, err := west.Dial(ctx, "tcp", "10.9.0.2:443")
//	out, err := west.Command(ctx, "curl", "http://10.9.0.2:443").Output()
//	east.Drop(t, "tcp dport 443")
//
// It needs root and the programs ip (iproute2) and nft (nftables), and imports
// only the standard library. Names, links and rules go away with the test.
package netns
