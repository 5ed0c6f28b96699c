package ssh_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"io"

	cryptossh "golang.org/x/crypto/ssh"

	"culvert.dev/connect/ssh"
	"culvert.dev/identity/sshkeys"
	"culvert.dev/internal/testnet"
)

// A client reaches a service by its name, as "ssh -W hello.example:80" does.
func Example() {
	_, host, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err)
	}
	_, alice, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err)
	}
	hostKey, _ := cryptossh.NewSignerFromKey(host)
	key, _ := cryptossh.NewSignerFromKey(alice)
	keys, _ := sshkeys.ParseAuthorizedKeys(string(cryptossh.MarshalAuthorizedKey(key.PublicKey())))

	p := &ssh.Protocol{}
	if err := p.Use(ssh.NewConfig(&sshkeys.Authority{Keys: keys}, hostKey)); err != nil {
		panic(err)
	}
	addr, stop, err := testnet.ServeExample(p)
	if err != nil {
		panic(err)
	}
	defer stop()

	c, err := cryptossh.Dial("tcp", addr, &cryptossh.ClientConfig{
		User: "alice", Auth: []cryptossh.AuthMethod{cryptossh.PublicKeys(key)}, HostKeyCallback: cryptossh.FixedHostKey(hostKey.PublicKey()),
	})
	if err != nil {
		panic(err)
	}
	defer c.Close()
	stream, err := c.Dial("tcp", "hello.example:80")
	if err != nil {
		panic(err)
	}
	fmt.Fprint(stream, "hello")
	b := make([]byte, 5)
	_, err = io.ReadFull(stream, b)
	fmt.Println(string(b), err)
	// Output: hello <nil>
}
