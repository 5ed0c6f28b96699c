//go:build linux

package main

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// makeSSHKeys makes the key that the hosts and the user of SSH have, beside those of
// makeKeys.
func makeSSHKeys() error {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	block, err := ssh.MarshalPrivateKey(private, "bench")
	if err != nil {
		return err
	}
	if err := os.WriteFile(keyFile("ssh"), pem.EncodeToMemory(block), 0o600); err != nil {
		return err
	}
	key, err := ssh.NewPublicKey(public)
	if err != nil {
		return err
	}
	line := string(ssh.MarshalAuthorizedKey(key))
	return os.WriteFile(keyFile("authorized_keys"), []byte(line[:len(line)-1]+" bench\n"), 0o644)
}

// A connectors is a process that holds idle sessions: what they cost it is in no figure.
type connectors struct {
	ctx     context.Context
	running sync.WaitGroup
}

// connectorsMain opens sessions until standard input ends.
func connectorsMain() error {
	ctx, stop := context.WithCancel(context.Background())
	c := &connectors{ctx: ctx}
	defer c.running.Wait()
	defer stop()
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for in.Scan() {
		var j job
		if err := json.Unmarshal(in.Bytes(), &j); err != nil {
			return fmt.Errorf("job %q: %w", in.Text(), err)
		}
		r := report{Count: j.N}
		if err := c.open(j); err != nil {
			r.Err = err.Error()
		}
		if err := out.Encode(r); err != nil {
			return err
		}
	}
	return in.Err()
}

// open opens j.N sessions, a few at a time, and returns once all of them have a name.
func (c *connectors) open(j job) error {
	const atOnce = 8
	one := c.reverse
	if j.Op == "ssh" {
		one = c.ssh
	}
	to := apart(j.To.String())
	errs := make(chan error, j.N)
	slots := make(chan struct{}, atOnce)
	for range j.N {
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			errs <- one(to)
		}()
	}
	for range j.N {
		if err := <-errs; err != nil {
			return err
		}
	}
	return nil
}

// A sessionDialer is the Transport to a gateway: a connection of its own for each session, by
// CONNECT inside of TLS.
type sessionDialer struct{ connect.Dialer }

func (d *sessionDialer) Dial(ctx context.Context, _ *tunnel.Endpoint, req *tunnel.Request) (net.Conn, error) {
	return d.DialContext(ctx, "tcp", req.Target())
}

func (*sessionDialer) Check(*tunnel.Endpoint) error { return nil }

func (*sessionDialer) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

// reverse opens a session that registers a name.
func (c *connectors) reverse(to string) error {
	config := toProxy()
	config.ServerName = quicName
	changed := make(chan struct{}, 1)
	client := &reverse.Client{
		Gateways: []reverse.Gateway{{Name: to, Transport: &sessionDialer{connect.Dialer{Proxy: to, TLS: config}}}},
		Changed: func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		},
	}
	name, err := tunnel.ParsePattern(serviceName(0))
	if err != nil {
		return err
	}
	client.SetNames([]reverse.Registration{{Name: name}})
	c.running.Go(func() { _ = client.Run(c.ctx) })
	late := time.After(patience)
	for {
		select {
		case <-changed:
		case <-late:
			return fmt.Errorf("no session with the gateway: %+v", client.State())
		}
		if s := client.State(); len(s) == 1 && s[0].Connected {
			for _, n := range s[0].Names {
				if n.Reason != "" {
					return fmt.Errorf("the gateway refused the name: %s", n.Error)
				}
			}
			return nil
		}
	}
}

// ssh opens a connection of SSH that asks for a name as ssh -R does, or for a port where to is
// no culvert.
func (c *connectors) ssh(to string) error {
	data, err := os.ReadFile(keyFile("ssh"))
	if err != nil {
		return err
	}
	signer, err := ssh.ParsePrivateKey(data)
	if err != nil {
		return err
	}
	client, err := ssh.Dial("tcp", to, &ssh.ClientConfig{
		User: "root", Auth: []ssh.AuthMethod{ssh.PublicKeys(signer)}, HostKeyCallback: ssh.FixedHostKey(signer.PublicKey()), Timeout: patience,
	})
	if err != nil {
		return err
	}
	c.running.Go(func() {
		<-c.ctx.Done()
		_ = client.Close()
	})
	forward := struct {
		Addr string
		Port uint32
	}{serviceName(0), 443}
	if string(client.ServerVersion()) != "SSH-2.0-culvert" {
		forward.Addr, forward.Port = "127.0.0.1", 0
	}
	ok, _, err := client.SendRequest("tcpip-forward", true, ssh.Marshal(&forward))
	if err == nil && !ok {
		err = fmt.Errorf("ssh: %q is refused", forward.Addr)
	}
	return err
}
