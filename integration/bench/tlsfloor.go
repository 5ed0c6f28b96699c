//go:build linux

package main

import (
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"os"
	"os/exec"
	"time"
)

// tlsFloor is what the bytes of a reverse session cost in crypto/tls and the kernel alone: a
// connection of TLS 1.3 for each client, without frames, windows, names or limits, and two
// goroutines for each at either end. Nobody else should be compared with it.
func tlsFloor(config *naiveConfig) error {
	pair, err := tls.LoadX509KeyPair(keyFile("bench.crt"), keyFile("bench.key"))
	if err != nil {
		return err
	}
	both := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13, InsecureSkipVerify: true}
	if config.Reverse == "mux-gateway" || config.Reverse == "mux-connector" {
		return muxFloorEnd(config, both)
	}
	if config.Reverse == "connector" {
		for range 32 { // as many clients at once
			go func() {
				for {
					if tlsFloorServe(config, both) != nil {
						time.Sleep(100 * time.Millisecond)
					}
				}
			}()
		}
		select {}
	}
	at, err := tls.Listen("tcp", config.At, both)
	if err != nil {
		return err
	}
	idle := make(chan *tls.Conn, 1024)
	go func() {
		for {
			c, err := at.Accept()
			if err != nil {
				return
			}
			go func() {
				if c := c.(*tls.Conn); c.Handshake() == nil {
					idle <- c
				}
			}()
		}
	}()
	ln, err := net.Listen("tcp", config.Listen)
	if err != nil {
		return err
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go carryBoth(c, <-idle)
	}
}

// tlsFloorServe serves one client of the connector.
func tlsFloorServe(config *naiveConfig, both *tls.Config) error {
	c, err := tls.Dial("tcp", config.At, both)
	if err != nil {
		return err
	}
	defer c.Close()
	first := make([]byte, 16<<10)
	n, err := c.Read(first)
	if err != nil {
		return err
	}
	to, err := net.Dial("tcp", config.Routes[serviceName(0)])
	if err != nil {
		return err
	}
	if _, err := to.Write(first[:n]); err != nil {
		return err
	}
	carryBoth(c, to)
	return nil
}

// carryBoth carries both ways until either has ended, and closes both.
func carryBoth(a, b io.ReadWriteCloser) {
	done := make(chan struct{}, 2)
	one := func(to io.Writer, from io.Reader) {
		buf := make([]byte, 64<<10)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				if _, werr := to.Write(buf[:n]); werr != nil {
					err = werr
				}
			}
			if err != nil {
				break
			}
		}
		done <- struct{}{}
	}
	go one(a, b)
	go one(b, a)
	<-done
	_, _ = a.Close(), b.Close()
	<-done
}

// tlsFloorCommand is one end of it.
func tlsFloorCommand(end string) func(r rig) (*exec.Cmd, error) {
	return func(r rig) (*exec.Cmd, error) {
		config, err := json.Marshal(naiveConfig{Reverse: end, Listen: r.listen, At: apart(r.listen), Routes: map[string]string{serviceName(0): r.target(0)}})
		if err != nil {
			return nil, err
		}
		file, err := r.write("floor-"+end+".json", string(config))
		if err != nil {
			return nil, err
		}
		self, err := os.Executable()
		return exec.Command(self, "-role", "naive", "-naive-config", file), err
	}
}
