package file

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"culvert.dev/registry"
)

// Limits of files with credentials.
const (
	maxAuthSize = 4 << 20 // bytes
	maxUserLen  = 128     // bytes of a user's name

	// maxCost bounds what one wrong password costs the gateway: at 14 a
	// bcrypt check takes about a second.
	maxCost = 14
)

// An Auth is who may use a listener's CONNECT, SOCKS and WebSocket: whoever
// shows the password of one of the Users, one of the Tokens or a token of one of the
// Issuers.
type Auth struct {
	Users  Users             `yaml:"users"` // for Basic credentials and for SOCKS
	Tokens map[Digest]string // names by token, for Bearer credentials

	Issuers []string `yaml:"issuers" what:"an issuer" unique:"issuer" empty:"list issuers of identity.tokens, or leave the key out"`

	UsersFile  string `yaml:"usersFile"`  // where more Users are, "" if nowhere
	TokensFile string `yaml:"tokensFile"` // where Tokens are
}

func (*Auth) check(d *decoder, at mapping) {
	if len(at.node.Content) == 0 {
		d.errorf(at.node, "name users, usersFile, tokensFile or issuers", "auth is empty, which would refuse every client")
	}
}

// Users are hashes of passwords by the names of users.
type Users map[string]Hash

// A Hash is a bcrypt hash, "$2y$10$...", and a Digest is the SHA-256 of a token. Neither
// prints itself.
type (
	Hash   = registry.Secret
	Digest = registry.TokenDigest
)

// decode reads a mapping of names to hashes. Its errors quote nothing of it:
// who mixes up the two sides must not find a hash in the log.
func (u *Users) decode(d *decoder, n *yaml.Node, key string) {
	if !d.is(n, yaml.MappingNode, key) {
		return
	}
	if len(n.Content) == 0 {
		d.errorf(n, "name users, or leave the key out", "users is empty")
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode || v.Kind != yaml.ScalarNode {
			d.errorf(k, `write NAME: "$2y$..."`, "a user must be a name and a hash")
			continue
		}
		u.add(k.Value, v.Value, func(hint, msg string) { d.errorf(k, hint, "%s", msg) })
	}
}

// add checks and adds one user; complain is told what is wrong.
func (u *Users) add(name, hash string, complain func(hint, msg string)) {
	switch {
	case name == "" || len(name) > maxUserLen || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f || r == ':' || r == '$' }):
		complain("use 1 to 128 characters without : and $", "the name of a user is not usable")
	case !isBcrypt(hash):
		complain("make one of cost 14 at most with: htpasswd -nbB NAME PASSWORD", "a user's hash is not bcrypt ($2y$...)")
	case (*u)[name] != "":
		complain("keep one of them", "a user is listed twice")
	default:
		if *u == nil {
			*u = Users{}
		}
		(*u)[name] = Hash(hash)
	}
}

// isBcrypt reports whether s reads as "$2b$CC$" and 53 characters.
func isBcrypt(s string) bool {
	if len(s) != 60 || s[0] != '$' || s[1] != '2' || strings.IndexByte("aby", s[2]) < 0 || s[3] != '$' || s[6] != '$' {
		return false
	}
	tens, ones := s[4]-'0', s[5]-'0'
	if cost := int(tens)*10 + int(ones); tens > 9 || ones > 9 || cost < 4 || cost > maxCost {
		return false
	}
	for _, c := range []byte(s[7:]) {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '.' || c == '/') {
			return false
		}
	}
	return true
}

// readFiles reads the credentials and keys that the configuration names and
// takes the sum of everything that was read. Before is the identity in force, or nil.
func (d *decoder) readFiles(path string, data []byte, before *Identity) {
	d.cfg.text, d.cfg.files = digestOf(data), []string{path}
	all := [][]byte{data}
	for i := range d.cfg.Listeners {
		at, auth := d.listener(i), d.cfg.Listeners[i].Auth
		if auth == nil {
			continue
		}
		if at.object("auth").value("users") != nil {
			if why := writable(path); why != "" {
				d.errorf(at.value("auth"), "chmod go-w it, as it has credentials in it", "%q %s", path, why)
			}
			d.warnFile(at.value("auth"), path)
		}
		for _, f := range []struct {
			node *yaml.Node
			name *string
			line func(to *Auth, line string, complain func(hint, msg string))
		}{
			{at.object("auth").value("usersFile"), &auth.UsersFile, func(to *Auth, line string, complain func(hint, msg string)) {
				name, hash, _ := strings.Cut(line, ":")
				to.Users.add(name, hash, complain)
			}},
			{at.object("auth").value("tokensFile"), &auth.TokensFile, addToken},
		} {
			if f.node == nil || *f.name == "" {
				continue
			}
			if !filepath.IsAbs(*f.name) {
				*f.name = filepath.Join(filepath.Dir(path), *f.name)
			}
			content, err := read(*f.name, maxAuthSize)
			if err != nil {
				d.errorf(f.node, "paths are relative to the configuration file", "%v", err)
				continue
			}
			d.cfg.files = append(d.cfg.files, *f.name)
			all = append(all, content)
			if why := writable(*f.name); why != "" {
				d.errorf(f.node, "chmod go-w it", "%q %s", *f.name, why)
				continue
			}
			d.warnFile(f.node, *f.name)
			d.lines(*f.name, content, func(line string, complain func(hint, msg string)) { f.line(auth, line, complain) })
		}
		d.warnCheap(at.value("auth"), auth)
		if len(d.errs) == 0 && len(auth.Users)+len(auth.Tokens)+len(auth.Issuers) == 0 {
			d.errorf(at.value("auth"), "add one, or leave auth out", "auth has no user, no token and no issuer, which would refuse every client")
		}
		if len(d.errs) == 0 && len(auth.Users) == 0 && slices.Contains(d.cfg.Listeners[i].spoken(), "socks5") {
			d.errorf(at.value("auth"), "add users, or take socks5 from its protocols", "auth has no user: a SOCKS client can't send a token, so every one would be refused")
		}
	}
	all = append(all, d.readIdentityFiles(path, before)...)
	all = append(all, d.readEnrollment(path)...)
	all = append(all, d.readTLSFiles(path)...)
	all = append(all, d.readIssuerFiles(path)...)
	all = append(all, d.readHopFiles(path)...)
	all = append(all, d.readProxyFiles(path)...)
	all = append(all, d.readServiceTLSFiles(path)...)
	all = append(all, d.readDNSFiles(path)...)
	all = append(all, d.readSSHFiles(path)...)
	d.cfg.sum = sum(all...)
}

// lines calls each for every line that is not empty or a comment.
func (d *decoder) lines(name string, content []byte, each func(line string, complain func(hint, msg string))) {
	n := 0
	for line := range strings.Lines(string(content)) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		each(line, func(hint, msg string) {
			if len(d.errs) <= 10*maxErrors {
				d.errs = append(d.errs, &Error{File: name, Line: n, Column: 1, Msg: msg, Hint: hint})
			}
		})
	}
}

// addToken reads "NAME:SHA256", the digest in hexadecimal. Tokens in clear are
// not read: who gets to see the file must not get in by it.
func addToken(to *Auth, line string, complain func(hint, msg string)) {
	const how = `write NAME:DIGEST, with the digest that printf %s "$TOKEN" | sha256sum prints`
	name, digits, _ := strings.Cut(line, ":")
	b, err := hex.DecodeString(digits)
	if err != nil || len(b) != sha256.Size || name == "" || len(name) > maxUserLen {
		complain(how, "not a name and the SHA-256 of a token")
		return
	}
	digest := Digest(b)
	if digest == sha256.Sum256(nil) {
		complain(how, "this is the digest of an empty token")
		return
	}
	if _, ok := to.Tokens[digest]; ok {
		complain("give each client its own token", "a token is listed twice")
		return
	}
	if to.Tokens == nil {
		to.Tokens = map[Digest]string{}
	}
	to.Tokens[digest] = name
}

// writable says who else may change a file with credentials, "" for nobody.
func writable(path string) string {
	if runtime.GOOS == "windows" { // its mode bits say nothing of this
		return ""
	}
	info, err := os.Stat(path)
	if err != nil {
		return ""
	}
	if mode := info.Mode().Perm(); mode&0o022 != 0 {
		return "may be written by others (mode " + mode.String() + ")"
	}
	return ""
}

// leastCost is that of bcrypt below which a stolen hash is soon guessed.
const leastCost = 10

// warnCheap warns of hashes that are guessed too easily.
func (d *decoder) warnCheap(n *yaml.Node, a *Auth) {
	cheap := 0
	for _, h := range a.Users {
		if cost := int(h[4]-'0')*10 + int(h[5]-'0'); cost < leastCost { // as isBcrypt has seen
			cheap++
		}
	}
	if cheap > 0 {
		d.warnf(n, "make them with: culvert config password NAME", "%d of %d users have a password hash of a cost below %d, which is soon guessed from a stolen file", cheap, len(a.Users), leastCost)
	}
}

// sum digests contents so that no two lists of them have the same sum.
func sum(contents ...[]byte) digest {
	all := make([]byte, 0, len(contents)*len(digest{}))
	for _, c := range contents {
		one := digestOf(c)
		all = append(all, one[:]...)
	}
	return digestOf(all)
}
