//go:build linux

package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"syscall"
	"unsafe"
)

// captureFloor is what a captured connection costs in Go and the kernel at least: it asks for the
// original destination, and asks config.At for that by CONNECT, with two goroutines for each. It
// decides nothing and keeps no limits. Nobody else should be compared with it.
func captureFloor(config *naiveConfig) error {
	ln, err := net.Listen("tcp", config.Listen)
	if err != nil {
		return err
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			_ = config.serveCaptured(c.(*net.TCPConn))
		}()
	}
}

func (n *naiveConfig) serveCaptured(client *net.TCPConn) error {
	to, err := originalDestination(client)
	if err != nil {
		return err
	}
	c, err := net.Dial("tcp", n.At)
	if err != nil {
		return err
	}
	server := c.(*net.TCPConn)
	defer server.Close()
	if _, err := fmt.Fprintf(server, "CONNECT %s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", to); err != nil {
		return err
	}
	in := bufio.NewReaderSize(server, 512)
	answer, err := http.ReadResponse(in, &http.Request{Method: http.MethodConnect})
	if err != nil || answer.StatusCode != http.StatusOK || in.Buffered() > 0 {
		return fmt.Errorf("CONNECT %s: %w", to, err)
	}
	copyBoth(client, server)
	return nil
}

// originalDestination returns where a connection of IPv4 went before nftables redirected it.
func originalDestination(c *net.TCPConn) (to netip.AddrPort, err error) {
	const originalDst = 80 // SO_ORIGINAL_DST
	raw, err := c.SyscallConn()
	if err != nil {
		return to, err
	}
	var failed syscall.Errno
	err = raw.Control(func(fd uintptr) {
		var a syscall.RawSockaddrInet4
		size := uint32(syscall.SizeofSockaddrInet4)
		_, _, failed = syscall.Syscall6(syscall.SYS_GETSOCKOPT, fd, syscall.IPPROTO_IP, originalDst, uintptr(unsafe.Pointer(&a)), uintptr(unsafe.Pointer(&size)), 0)
		port := binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&a.Port))[:])
		to = netip.AddrPortFrom(netip.AddrFrom4(a.Addr), port)
	})
	if err == nil && failed != 0 {
		err = failed
	}
	return to, err
}
