package kubeconfig

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"
)

// An Entry is a cluster, its user and the context of both. Paths are absolute.
type Entry struct {
	Name       string // of the cluster, the context, and the user where there is no User
	Server     string // URL
	ProxyURL   string // by which Server is reached; "" for none
	ServerName string // in the certificate of Server; "" means its host
	CAFile     string // of Server; "" leaves what is there

	// The credentials of the user. With User they are those that the files have by that name.
	// With none of the four, those of Name stay.
	CertFile, KeyFile string
	TokenFile         string
	User              string

	Namespace string // "" leaves what is there
	Current   bool   // makes the context the current one
	Replace   bool   // a context or cluster of that name which leads elsewhere, and other credentials of its user
}

// A TakenError is why an Entry is not merged: the files have another one of that name, or a user
// of that name with credentials of another kind.
type TakenError struct {
	Name   string
	Server string
	User   string // what credentials that user has, "exec" say; "" where it is not about a user
}

func (e *TakenError) Error() string {
	if e.User != "" {
		return fmt.Sprintf("the user %q is there and has %s", e.Name, e.User)
	}
	return fmt.Sprintf("%q is there and leads to %q", e.Name, e.Server)
}

// A document is one of the files of a kubeconfig.
type document struct {
	path string
	root *yaml.Node // whose content is a mapping
	used bool       // has something of the Entry
}

func (d *document) mapping() *yaml.Node { return d.root.Content[0] }

// use marks d as one that has something of the Entry.
func (d *document) use() *yaml.Node {
	d.used = true
	setDefault(d.mapping(), "apiVersion", "v1")
	setDefault(d.mapping(), "kind", "Config")
	return d.mapping()
}

func (d *document) encode() ([]byte, error) {
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(d.root), enc.Close()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// documents are the files of a kubeconfig, in the order in which they are looked at: the first
// one that has an item of some name counts.
type documents struct {
	all  []*document
	into *document // one of all, for what none of them has
}

// of returns the document that has an item of that name in a list, or into.
func (ds *documents) of(list, name string) *document {
	for _, d := range ds.all {
		if has(d.mapping(), list, name) {
			return d
		}
	}
	return ds.into
}

func (ds *documents) named(list, of, name string) (*yaml.Node, error) {
	d := ds.of(list, name)
	m, err := named(d.use(), list, of, name)
	if err != nil {
		err = fmt.Errorf("%s: %w", d.path, err)
	}
	return m, err
}

// merge puts e into ds. Everything else is kept.
func (ds *documents) merge(e *Entry) error {
	cluster, err := ds.named("clusters", "cluster", e.Name)
	if err != nil {
		return err
	}
	context, err := ds.named("contexts", "context", e.Name)
	if err != nil {
		return err
	}
	user, err := ds.userOf(e, context)
	if err != nil {
		return err
	}
	if !e.Replace {
		if server := text1(cluster, "server"); server != "" && server != e.Server {
			return fmt.Errorf("%s: %w", ds.of("clusters", e.Name).path, &TakenError{Name: e.Name, Server: server})
		}
		if of := text1(context, "cluster"); of != "" && of != e.Name {
			return fmt.Errorf("%s: %w", ds.of("contexts", e.Name).path, &TakenError{Name: e.Name, Server: of})
		}
	}
	set(cluster, "server", e.Server)
	setOrRemove(cluster, "proxy-url", e.ProxyURL)
	setOrRemove(cluster, "tls-server-name", e.ServerName)
	if e.CAFile != "" {
		setOrRemove(cluster, "certificate-authority-data", "")
		setOrRemove(cluster, "insecure-skip-tls-verify", "")
		set(cluster, "certificate-authority", e.CAFile)
	}
	set(context, "cluster", e.Name)
	if user != "" {
		set(context, "user", user)
	}
	if e.Namespace != "" {
		set(context, "namespace", e.Namespace)
	}
	if e.Current && ds.current() != e.Name {
		set(ds.into.use(), "current-context", e.Name)
	}
	return nil
}

// current returns the current context.
func (ds *documents) current() string {
	for _, d := range ds.all {
		if name := text1(d.mapping(), "current-context"); name != "" {
			return name
		}
	}
	return ""
}

// userOf puts the credentials of e into ds, and returns the name of the user for the context;
// "" leaves what the context has.
func (ds *documents) userOf(e *Entry, context *yaml.Node) (string, error) {
	known := func(name string) bool { return has(ds.of("users", name).mapping(), "users", name) }
	if e.User != "" {
		if !known(e.User) {
			return "", fmt.Errorf("no user is called %q", e.User)
		}
		return e.User, nil
	}
	if e.CertFile == "" && e.TokenFile == "" {
		if text1(context, "user") == "" && known(e.Name) {
			return e.Name, nil
		}
		return "", nil
	}
	user, err := ds.named("users", "user", e.Name)
	if err != nil {
		return "", err
	}
	for i := 0; i < len(user.Content) && !e.Replace; i += 2 {
		switch key := user.Content[i].Value; key {
		case "client-certificate", "client-key", "tokenFile": // as an Entry has them
		default:
			return "", fmt.Errorf("%s: %w", ds.of("users", e.Name).path, &TakenError{Name: e.Name, User: key})
		}
	}
	user.Content = nil // what it had was another way to say who it is
	setOrRemove(user, "client-certificate", e.CertFile)
	setOrRemove(user, "client-key", e.KeyFile)
	setOrRemove(user, "tokenFile", e.TokenFile)
	return e.Name, nil
}

// parse returns the document of a kubeconfig, whose content is a mapping.
func parse(text []byte) (*yaml.Node, error) {
	var root, more yaml.Node
	d := yaml.NewDecoder(bytes.NewReader(text))
	switch err := d.Decode(&root); {
	case err == io.EOF:
		root = yaml.Node{Kind: yaml.DocumentNode}
	case err != nil:
		return nil, err
	}
	if err := d.Decode(&more); err != io.EOF {
		return nil, errors.New("it has several documents, or does not end as YAML")
	}
	if len(root.Content) == 0 || root.Content[0].Tag == "!!null" {
		root.Content = []*yaml.Node{{Kind: yaml.MappingNode, Tag: "!!map"}}
	}
	if root.Content[0].Kind != yaml.MappingNode {
		return nil, errors.New("it is no kubeconfig: a mapping was expected")
	}
	return &root, nil
}

// value returns the value of a key of a mapping, nil for none.
func value(m *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(m.Content); i += 2 {
		if m.Content[i].Value == key {
			return m.Content[i+1]
		}
	}
	return nil
}

// text1 returns the text of a key, "" for none.
func text1(m *yaml.Node, key string) string {
	if v := value(m, key); v != nil && v.Kind == yaml.ScalarNode && v.Tag != "!!null" {
		return v.Value
	}
	return ""
}

func scalar(s string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s} }

// set sets a key of a mapping. The comments of what was there stay.
func set(m *yaml.Node, key, to string) {
	if v := value(m, key); v != nil {
		v.Kind, v.Tag, v.Value, v.Content, v.Alias, v.Anchor, v.Style = yaml.ScalarNode, "!!str", to, nil, nil, "", 0
		return
	}
	m.Content = append(m.Content, scalar(key), scalar(to))
}

func setDefault(m *yaml.Node, key, to string) {
	if text1(m, key) == "" {
		set(m, key, to)
	}
}

// setOrRemove sets a key of a mapping, and removes it for "".
func setOrRemove(m *yaml.Node, key, to string) {
	if to != "" {
		set(m, key, to)
		return
	}
	for i := 0; i+1 < len(m.Content); i += 2 {
		if m.Content[i].Value == key {
			m.Content = append(m.Content[:i:i], m.Content[i+2:]...)
			return
		}
	}
}

// has reports whether a list of m has an item of that name.
func has(m *yaml.Node, list, name string) bool {
	if seq := value(m, list); seq != nil {
		for _, item := range seq.Content {
			if item.Kind == yaml.MappingNode && text1(item, "name") == name {
				return true
			}
		}
	}
	return false
}

// named returns what the key of has in the item of a list of m that has the name, and makes
// all that is missing.
func named(m *yaml.Node, list, of, name string) (*yaml.Node, error) {
	seq := value(m, list)
	if seq == nil {
		seq = &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
		m.Content = append(m.Content, scalar(list), seq)
	}
	if seq.Tag == "!!null" {
		*seq = yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	}
	if seq.Kind != yaml.SequenceNode {
		return nil, fmt.Errorf("%s is no list", list)
	}
	if len(seq.Content) == 0 {
		seq.Style = 0 // of [], as which kubectl writes it
	}
	var item *yaml.Node
	for _, one := range seq.Content {
		if one.Kind == yaml.MappingNode && text1(one, "name") == name {
			item = one
			break
		}
	}
	if item == nil {
		item = &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Content: []*yaml.Node{scalar("name"), scalar(name)}}
		seq.Content = append(seq.Content, item)
	}
	v := value(item, of)
	if v == nil || v.Tag == "!!null" {
		v = &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
		setOrRemove(item, of, "")
		item.Content = append(item.Content, scalar(of), v)
	}
	if v.Kind != yaml.MappingNode || v.Anchor != "" {
		return nil, fmt.Errorf("%s: %q is no mapping of its own", list, name)
	}
	return v, nil
}
