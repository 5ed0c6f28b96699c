//go:build linux

package main

import (
	"net"
	"os"

	"golang.org/x/crypto/ssh"
)

// sshFloor is what the bytes of "ssh -R" cost in golang.org/x/crypto/ssh alone: it lets anybody
// in and forwards every client of config.Listen, with two goroutines for each. Nobody else
// should be compared with it.
func sshFloor(config *naiveConfig) error {
	pem, err := os.ReadFile(keyFile("ssh"))
	if err != nil {
		return err
	}
	key, err := ssh.ParsePrivateKey(pem)
	if err != nil {
		return err
	}
	server := &ssh.ServerConfig{
		Config:            ssh.Config{Ciphers: []string{ssh.CipherAES128GCM}},
		PublicKeyCallback: func(ssh.ConnMetadata, ssh.PublicKey) (*ssh.Permissions, error) { return nil, nil },
	}
	server.AddHostKey(key)
	at, err := net.Listen("tcp", config.At)
	if err != nil {
		return err
	}
	c, err := at.Accept() // the first is whether this listens
	for ; err == nil; c, err = at.Accept() {
		conn, channels, requests, err := ssh.NewServerConn(c, server)
		if err != nil {
			continue
		}
		go func() {
			for ch := range channels {
				_ = ch.Reject(ssh.Prohibited, "")
			}
		}()
		for r := range requests {
			_ = r.Reply(r.Type == "tcpip-forward", nil)
			if r.Type == "tcpip-forward" {
				go ssh.DiscardRequests(requests)
				return sshFloorServe(config, conn, r.Payload)
			}
		}
	}
	return err
}

// sshFloorServe forwards clients to what conn has asked for.
func sshFloorServe(config *naiveConfig, conn ssh.Conn, asked []byte) error {
	var forward struct {
		Addr string
		Port uint32
	}
	if err := ssh.Unmarshal(asked, &forward); err != nil {
		return err
	}
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
			ch, requests, err := conn.OpenChannel("forwarded-tcpip", ssh.Marshal(&struct {
				Addr       string
				Port       uint32
				Origin     string
				OriginPort uint32
			}{forward.Addr, forward.Port, "127.0.0.1", 1}))
			if err != nil {
				_ = c.Close()
				return
			}
			go ssh.DiscardRequests(requests)
			carryBoth(c, ch)
		}()
	}
}
