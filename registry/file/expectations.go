package file

import (
	"net/netip"

	"go.yaml.in/yaml/v3"
)

// An Expectation says what policies are to decide about one request.
type Expectation struct {
	As       string     `yaml:"as" what:"a caller"`
	From     netip.Addr `yaml:"from" what:"an address" as:"clientAddress"`
	To       string     `yaml:"to,required" what:"a target"`
	Listener string     `yaml:"listener" what:"a listener"`
	Protocol string     `yaml:"protocol" what:"a protocol"`
	Expect   string     `yaml:"expect,required" oneof:"allow deny"`
	By       string     `yaml:"by" what:"a policy"`

	Line int // in the file
}

// expectations are the root of a file of them.
type expectations struct {
	Tests expectationList `yaml:"tests,required"`
}

// An expectationList remembers the lines of its elements.
type expectationList []Expectation

func (l *expectationList) decode(d *decoder, n *yaml.Node, key string) {
	if !d.is(n, yaml.SequenceNode, key) {
		return
	}
	if len(n.Content) == 0 {
		d.errorf(n, "", "%s is empty", key)
	}
	for _, n := range n.Content {
		e := Expectation{}
		into(d, n, "a test", &e)
		e.Line = n.Line
		*l = append(*l, e)
	}
}

// LoadExpectations reads a file of expectations, which is as strict as a configuration.
// Mistakes are returned as Errors.
func LoadExpectations(path string) ([]Expectation, error) {
	data, err := read(path, maxSize)
	if err != nil {
		return nil, err
	}
	d := &decoder{file: path}
	var all expectations
	if root := d.document(data); root != nil {
		into(d, root, "a file of expectations", &all)
	}
	if err := d.errs.sorted(); err != nil {
		return nil, err
	}
	return all.Tests, nil
}

// parseClientAddress parses the address of a client.
func parseClientAddress(what, s string) (netip.Addr, *complaint) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return a, complain("", "%s %q is not an IP address", what, clip(s))
	}
	return a, nil
}
