// Package localuser finds out which user of this machine has opened a TCP connection to it
// over loopback: such a port is open to every user, and to what others trick a program of
// theirs into.
//
//	check := &localuser.Check{UIDs: []uint32{uint32(os.Getuid())}}
//	if err := check.Admit(source, local); err != nil {
//		return err // who is at source may not connect
//	}
//
// Of a Unix socket the system tells: see package unixsocket. AdmitProcess is for those.
package localuser
