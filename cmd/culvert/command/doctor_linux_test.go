package command

import (
	"context"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"

	"culvert.dev/internal/testnet"
)

// Where large packets are lost and small ones are not, the doctor says that there is an MTU
// hole. What is in the way here lets connections with small segments through alone.
func TestDoctorNamesAnMTUHole(t *testing.T) {
	w := newReverseWorld(t)
	m := newSickMachine(t, w)
	ln := testnet.Listen(t)
	var all sync.WaitGroup
	ended := make(chan struct{})
	t.Cleanup(func() { _ = ln.Close(); close(ended); all.Wait() })
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			all.Go(func() { hole(c, w.gateway.addrs[0], ended) })
		}
	})
	m.o.agent.gateways = []string{ln.Addr().String()}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	m.d.examine(ctx, &m.o)
	for _, c := range m.d.report.Checks {
		if c.Check == "mtu" && c.State == checkFailed && c.Remedy != "" {
			return
		}
	}
	t.Errorf("the checks are %+v, want an MTU hole", m.d.report.Checks)
}

// hole passes c on to an address if its segments are small, and else holds it.
func hole(c net.Conn, to string, ended <-chan struct{}) {
	defer c.Close()
	size := 0
	if raw, err := c.(syscall.Conn).SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { size, _ = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_MAXSEG) })
	}
	if size > smallSegment {
		<-ended
		return
	}
	up, err := net.Dial("tcp", to)
	if err != nil {
		return
	}
	defer up.Close()
	done := make(chan struct{}, 2)
	go func() { _, _ = io.Copy(up, c); done <- struct{}{} }()
	go func() { _, _ = io.Copy(c, up); done <- struct{}{} }()
	select {
	case <-done:
	case <-ended:
	}
}
