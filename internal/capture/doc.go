// Package capture leads connections of programs on this host to a listener of this process, by
// rules of nftables, and serves them by the address that the program connected to.
//
//	rules := capture.Rules{VIPs: true, Port: port, Mark: capture.Mark}
//	c, err := capture.Install(rules)
//	err = c.SetVIPs(addrs)
//	err = c.Close()
//
// The table of nftables goes with the process, also where it is killed. Connections that stand
// are left alone. Sockets with the mark, connections to this host, and Rules.Except are not
// captured. Only TCP is.
//
// It works on Linux. Elsewhere Install fails and says so.
package capture
