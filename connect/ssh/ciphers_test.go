package ssh

import (
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"
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
