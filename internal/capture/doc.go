// Package capture leads connections of programs on this host to a listener of this process, by
// rules of nftables, and serves them by the address that the program connected to.
//
//	rules := capture.Rules{VIPs: true, Port: port, Mark: capture.Mark}
//	c, err := capture.Install(rules)
//	err = c.SetVIPs(addrs)
//	err = c.Close()
//
// The table of nftables goes with the process, also where it is killed; rules of routing that the
// kernel keeps then have no effect, and the next Install or Remove of the same Name takes them
// away. Captures with different Names are side by side.
//
// Connections that stand are left alone. Sockets with the mark, connections to this host, and
// Rules.Except are not captured. Only TCP is. The user and the cgroup of a program are those of the
// socket: the kernel has them from when the program made it, so that a program with setuid has the
// user that it became. Packets of packet sockets (AF_PACKET) pass no rules.
//
// It works on Linux. Elsewhere Install fails and says so.
package capture
