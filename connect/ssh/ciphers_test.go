package ssh

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// kexInitOf is what a client begins with that has these ciphers and MACs in both directions.
func kexInitOf(ident string, ciphers, macs []string) []byte {
	payload := ssh.Marshal(&kexInit{CiphersClientServer: ciphers, CiphersServerClient: ciphers, MACsClientServer: macs, MACsServerClient: macs})
	const padding = 4
	b := binary.BigEndian.AppendUint32([]byte(ident+"\r\n"), uint32(1+len(payload)+padding))
	b = append(append(b, padding), payload...)
	return append(b, make([]byte, padding)...)
}

func TestCiphersOfClients(t *testing.T) {
	const chacha, gcm, ctr, etm = ssh.CipherChaCha20Poly1305, ssh.CipherAES256GCM, ssh.CipherAES128CTR, ssh.HMACSHA256ETM
	for _, tt := range []struct {
		name string
		sent []byte
		want []string
	}{
		{"of OpenSSH", kexInitOf("SSH-2.0-OpenSSH_9.2p1", []string{chacha, ctr, ssh.CipherAES128GCM, gcm}, []string{etm}), gcmCiphers},
		{"no GCM", kexInitOf("SSH-2.0-OpenSSH_5.3", []string{"3des-cbc", ctr}, []string{"hmac-md5", etm}), ctrCiphers},
		{"no MAC of ours", kexInitOf("SSH-2.0-OpenSSH_5.3", []string{ctr, chacha}, []string{"hmac-md5"}), ciphers},
		{"ChaCha20 alone", kexInitOf("SSH-2.0-OpenSSH_9.2p1", []string{chacha}, []string{etm}), ciphers},
		{"another message", []byte("SSH-2.0-OpenSSH_9\r\n\x00\x00\x00\x0c\x0a\x05\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), ciphers},
		{"no packet", []byte("SSH-2.0-OpenSSH_9\r\nGET / HTTP/1.1\r\n"), ciphers},
		{"more padding than packet", []byte("SSH-2.0-OpenSSH_9\r\n\x00\x00\x00\x0c\xff"), ciphers},
		{"an empty packet", []byte("SSH-2.0-OpenSSH_9\r\n\x00\x00\x00\x00\x00"), ciphers},
		{"a long version", []byte("SSH-2.0-OpenSSH_" + strings.Repeat("9", maxVersion)), ciphers},
	} {
		k, whole := readKexInit(tt.sent)
		if got := ciphersFor(k); !whole || !slices.Equal(got, tt.want) {
			t.Errorf("%s: whole %t, %v, want %v", tt.name, whole, got, tt.want)
		}
	}
	whole := kexInitOf("SSH-2.0-OpenSSH_9.2p1", []string{gcm}, nil)
	for n := range whole {
		if _, done := readKexInit(whole[:n]); done {
			t.Fatalf("%d of %d bytes are a whole message", n, len(whole))
		}
	}
}

// A connection that has to make room ends while its first message is awaited, although that wait
// has a deadline of its own.
func TestMakesRoomWhileTheFirstMessageIsAwaited(t *testing.T) {
	p := newProtocol(t, newKey(t).PublicKey(), "")
	g := tunneltest.Serve(t, tunneltest.Setup{
		Protocols: []tunnel.Protocol{p}, Resolver: tunneltest.Table{},
		Limits: tunnel.Limits{MaxPendingConnections: 1, HandshakeTimeout: time.Hour, ConnectionRatePerClient: -1},
	})
	dial := func() net.Conn {
		c, err := net.Dial("tcp", g.Addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(loginTimeout / 2))
		if _, err := c.Write([]byte("SSH-2.0-OpenSSH_9.2p1\r\n")); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != version+"\r\n" {
			t.Fatalf("%q, %v, want the version of the server", line, err)
		}
		return c
	}
	first := dial()
	dial() // within the wait for the first message of the other one
	if _, err := io.Copy(io.Discard, first); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection that had to make room is open")
	}
}

func FuzzKexInit(f *testing.F) {
	f.Add(kexInitOf("SSH-2.0-OpenSSH_9.2p1", ciphers, macs))
	f.Add([]byte("SSH-2.0-OpenSSH_9\r\n\x00\x00\x00\x0c\x0a"))
	f.Fuzz(func(t *testing.T, b []byte) {
		k, whole := readKexInit(b)
		if k != nil && !whole {
			t.Fatal("a message that is not whole")
		}
		if !whole && len(b) >= maxVersion+maxKexInit {
			t.Fatalf("%d bytes are not enough", len(b))
		}
		if len(ciphersFor(k)) == 0 {
			t.Fatal("no cipher")
		}
	})
}
