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

	// The credentials of the user. With User they are those that the file has by that name.
	// With none of the four, those of Name stay.
	CertFile, KeyFile string
	TokenFile         string
	User              string

	Namespace string // "" leaves what is there
	Current   bool   // makes the context the current one
	Replace   bool   // a context or cluster of that name which leads elsewhere
}

// A TakenError is why an Entry is not merged: the file has another one of that name.
type TakenError struct{ Name, Server string }

func (e *TakenError) Error() string {
	return fmt.Sprintf("%q is there and leads to %q", e.Name, e.Server)
}

// Merge returns a kubeconfig with e in it. Everything else is kept.
func Merge(text []byte, e *Entry) ([]byte, error) {
	root, err := parse(text)
	if err != nil {
		return nil, err
	}
	m := root.Content[0]
	setDefault(m, "apiVersion", "v1")
	setDefault(m, "kind", "Config")
	cluster, err := named(m, "clusters", "cluster", e.Name)
	if err != nil {
		return nil, err
	}
	context, err := named(m, "contexts", "context", e.Name)
	if err != nil {
		return nil, err
	}
	user, err := e.userOf(m, context)
	if err != nil {
		return nil, err
	}
	if !e.Replace {
		if server := text1(cluster, "server"); server != "" && server != e.Server {
			return nil, &TakenError{e.Name, server}
		}
		if of := text1(context, "cluster"); of != "" && of != e.Name {
			return nil, &TakenError{e.Name, of}
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
	if e.Current {
		set(m, "current-context", e.Name)
	}
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(root), enc.Close()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// userOf puts the credentials of e into m, and returns the name of the user for the context;
// "" leaves what the context has.
func (e *Entry) userOf(m, context *yaml.Node) (string, error) {
	if e.User != "" {
		if !has(m, "users", e.User) {
			return "", fmt.Errorf("no user is called %q", e.User)
		}
		return e.User, nil
	}
	if e.CertFile == "" && e.TokenFile == "" {
		if text1(context, "user") == "" && has(m, "users", e.Name) {
			return e.Name, nil
		}
		return "", nil
	}
	user, err := named(m, "users", "user", e.Name)
	if err != nil {
		return "", err
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
