// Package activation has the listening sockets that systemd opens for a process, as
// sd_listen_fds(3) describes.
//
//	sockets := activation.FromEnvironment()
//	ln, err := sockets.Listen("web") // FileDescriptorName=web in the socket unit
//
// The descriptors stay open as long as the process runs: a listener that is closed can be
// opened again, and clients wait in the queue of the socket meanwhile.
package activation
