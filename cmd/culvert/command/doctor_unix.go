//go:build unix

package command

import "syscall"

// smallSegment is so small that no path loses it for its size: RFC 9293 section 3.7.1.
const smallSegment = 536

// limitSegment has a socket send and ask for segments of at most that many bytes.
func limitSegment(fd uintptr, bytes int) error {
	return syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_MAXSEG, bytes)
}
