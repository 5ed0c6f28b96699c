//go:build linux

package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
)

// naiveMain is the proxy that one writes in an afternoon: it reads the hello,
// looks up the name, dials, and starts two goroutines with io.Copy. It is told
// its listener and its routes in a file of JSON, and collects its garbage on
// SIGUSR1.
func naiveMain(file string) error {
	var config naiveConfig
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return err
	}
	ln, err := net.Listen("tcp", config.Listen)
	if err != nil {
		return err
	}
	collect := make(chan os.Signal, 1)
	signal.Notify(collect, syscall.SIGUSR1)
	go func() {
		for range collect {
			runtime.GC()
		}
	}()
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go config.serve(c.(*net.TCPConn))
	}
}

type naiveConfig struct {
	Listen string
	Routes map[string]string
}

func (n *naiveConfig) serve(client *net.TCPConn) {
	defer client.Close()
	buf := make([]byte, 4096)
	got := 0
	for got < 5 || got < helloLen(buf) {
		m, err := client.Read(buf[got:]) // fails on a full buffer, too
		if err != nil || m == 0 {
			return
		}
		got += m
	}
	name, err := serverName(buf[5:helloLen(buf)])
	if err != nil {
		return
	}
	c, err := net.Dial("tcp", n.Routes[name])
	if err != nil {
		return
	}
	server := c.(*net.TCPConn)
	defer server.Close()
	if _, err := server.Write(buf[:got]); err != nil {
		return
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = io.Copy(server, client)
		_ = server.CloseWrite()
	})
	wg.Go(func() {
		_, _ = io.Copy(client, server)
		_ = client.CloseWrite()
	})
	wg.Wait()
}

// serverName walks a ClientHello (RFC 8446 section 4.1.2) to its server_name.
func serverName(p []byte) (name string, err error) {
	defer func() {
		if r := recover(); r != nil { // an index out of range: this is the naive one
			err = fmt.Errorf("bad hello: %v", r)
		}
	}()
	p = p[4+2+32:]
	p = p[1+int(p[0]):]
	p = p[2+int(binary.BigEndian.Uint16(p)):]
	p = p[1+int(p[0]):]
	p = p[2:]
	for len(p) > 4 {
		kind, size := binary.BigEndian.Uint16(p), int(binary.BigEndian.Uint16(p[2:]))
		if kind == 0 {
			return string(p[4+5 : 4+size]), nil
		}
		p = p[4+size:]
	}
	return "", errors.New("no name")
}
